"""The pages' answers: one module a page, each of pure functions and the routes under ``/api/<page>`` that call them."""
