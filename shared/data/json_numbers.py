"""JSON numbers that keep their text: ``0.00001`` is 1e-05 as a float, and a label of ``1e-05`` is not what people answer."""


class JsonNumber(float):
    """A number with decimals or an exponent, as JSON has it in ``text``."""

    text: str

    def __new__(cls, text: str) -> "JsonNumber":
        """Returns the number of a JSON text."""
        number = super().__new__(cls, text)
        number.text = text
        return number
