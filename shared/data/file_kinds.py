"""The kind of a data file that is not JSONL, by its first bytes, with how to convert it."""

from pathlib import Path

from shared.runtime.safe_files import parse_json

LOOKED_AT = 4096
"""The first bytes of a file that are examined."""

_MAGIC = {
    b"\x1f\x8b": "compressed with gzip; unpack it: gunzip -k {path}",
    b"\x28\xb5\x2f\xfd": "compressed with zstd; unpack it: unzstd {path}",
    b"\xfd7zXZ": "compressed with xz; unpack it: unxz -k {path}",
    b"BZh": "compressed with bzip2; unpack it: bunzip2 -k {path}",
    b"PK\x03\x04": "a zip archive; unpack it and name the file in it",
    b"PAR1": "a Parquet file; give it a name that ends in .parquet",
    b"\xff\xfe": "UTF-16; make UTF-8 of it: iconv -f UTF-16 -t UTF-8 {path} > NEW.jsonl",
    b"\xfe\xff": "UTF-16; make UTF-8 of it: iconv -f UTF-16 -t UTF-8 {path} > NEW.jsonl",
    b"version https://git-lfs": "a Git LFS pointer, not the file itself; fetch that: git lfs pull",
}

_ARRAY = "one JSON document, not one object a line; make JSONL of it: jq -c '.[]' {path} > NEW.jsonl"

_TABLE = (
    "a table ({first}), not JSONL; make that of it: python3 -c 'import csv, json, sys; "
    "[print(json.dumps(row)) for row in csv.DictReader(sys.stdin{tabs})]' < {path} > NEW.jsonl"
)


def other_than_jsonl(path: Path, beginning: bytes) -> str | None:
    """Returns the kind of a file that cannot be JSONL, and how to convert it; None for one that may be JSONL.

    A file of which single lines are wrong may be JSONL: its reader names the line.
    """
    for magic, description in _MAGIC.items():
        if beginning.startswith(magic):
            return description.format(path=path)
    text = beginning.removeprefix(b"\xef\xbb\xbf").lstrip()
    lines = text.splitlines()
    first = lines[0].strip() if lines else b""
    if text[:1] == b"<":
        return f"a web page or XML ({_shown(first)}), not JSONL; download the file itself, not the page that shows it"
    if first == b"{" or (text[:1] == b"[" and not _is_plain_list(first)):
        return _ARRAY.format(path=path)
    for separator, tabs in ((b"\t", ', delimiter="\\t"'), (b",", "")):
        columns = first.count(separator)
        alike = len(lines) > 1 and lines[1].count(separator) == columns and first[:1] not in (b'"', b"[")
        if columns and first[:1] != b"{" and (alike or path.suffix in (".csv", ".tsv")):
            return _TABLE.format(first=_shown(first), path=path, tabs=tabs)
    return None


def _is_plain_list(line: bytes) -> bool:
    """Returns whether a line is a complete list without objects, which is a single wrong line of a JSONL file."""
    try:
        return not any(isinstance(item, dict) for item in parse_json(line))
    except ValueError:
        return False


def _shown(line: bytes) -> str:
    return repr(line[:60].decode(errors="replace"))
