"""The application that people type: a run is started, watched, looked into and checked from here."""
