"""Types of the config's fields that name files of prompts or demonstrations."""

from typing import Annotated

from pydantic import PlainSerializer, PlainValidator

from shared.data import data_files
from shared.data.data_files import DataFile

_AsText = PlainSerializer(lambda files: files and [str(file) for file in files], return_type=list[str] | None)

WeightedFiles = Annotated[list[DataFile] | None, PlainValidator(data_files.weighted), _AsText]
Files = Annotated[list[DataFile] | None, PlainValidator(data_files.unweighted), _AsText]
