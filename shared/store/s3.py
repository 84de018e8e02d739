"""A client for S3's API: pre-signed requests (AWS Signature Version 4 in the query), and downloads that need nothing but such a URL.

Every request is made by a pre-signed URL, so that replicas are given what the trainer itself uses. Signatures carry the server's time,
which is learned from its answers: a clock that is minutes off signs URLs that hold all the same. Blocking; threads may share a client.
"""

import contextlib
import hashlib
import hmac
import http.client
import os
import re
import secrets
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from typing import TypeVar
from urllib.parse import quote, urlsplit
from xml.sax.saxutils import unescape

from blake3 import blake3

from shared.runtime.addresses import CA_VARIABLE, authorities, trusted
from shared.runtime.errors import ConfigError, DeadlineExceeded, MyxoError

FIELD, REGION_FIELD, HTTP_FIELD = "weights.object_store_url", "weights.object_store_region", "weights.object_store_allow_http"
KEY_VARIABLE, SECRET_VARIABLE, TOKEN_VARIABLE = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"
SOCKET_SECONDS = 20.0  # without a byte, or for `PIECE_BYTES` to leave, after which a connection counts as broken
REQUEST_SECONDS = 60.0  # the deadline for a request that carries no object
PROBE_SECONDS = 15.0  # the same where somebody waits for a run's start
SIGNED_SECONDS = 900  # for which the client's own URLs hold
RETRY_PAUSE = 0.25, 5.0  # the first pause before another attempt, and the longest
PIECE_BYTES = 1 << 18  # that are read or sent at a time
MAX_ANSWER = 4 << 20  # bytes of an answer that is no object
_BROKEN = (OSError, http.client.HTTPException, ssl.SSLError)
Result = TypeVar("Result")
_FULL = {"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "InsufficientStorage", "EntityTooLarge"}


class ObjectGone(MyxoError):
    """The store does not hold the object."""


class ObjectCorrupt(MyxoError):
    """What the store holds under an object's name is something else."""


class ObjectStoreRefused(MyxoError):
    """The store refuses a request for good. ``code``: its word for why. ``status``: of HTTP. ``region``: the one that it expects."""

    def __init__(self, what: str, status: int, code: str, message: str, region: str = "") -> None:
        self.status, self.code, self.region = status, code, region
        super().__init__(f"the object store refuses {what}: {code or status}{f' ({message})' if message else ''}")

    def as_config_error(self, location: "ObjectStoreLocation") -> ConfigError:
        """Returns the error of the field that has to change."""
        url = location.url
        if self.code in ("NoSuchBucket", "InvalidBucketName"):
            return ConfigError(FIELD, url, f"a bucket that is there; the store knows no bucket {location.bucket!r}")
        if self.code in ("AuthorizationHeaderMalformed", "PermanentRedirect", "AuthorizationQueryParametersError") or self.status == 301:
            there = self.region or "another"
            return ConfigError(REGION_FIELD, location.region, f"the region of bucket {location.bucket!r}, which is {there}")
        if self.code in ("RequestTimeTooSkewed", "RequestExpired"):
            return ConfigError(FIELD, url, "a store whose clock agrees with the time that it answers with; set its clock")
        if self.code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken"):
            return ConfigError(KEY_VARIABLE, "***", f"credentials that the store knows, with {SECRET_VARIABLE}; it says {self.code}")
        if self.code in _FULL or self.status == 507:
            return ConfigError(FIELD, url, f"a bucket with room; it takes no more objects ({self.code})")
        if self.status in (401, 403):
            rights = "s3:PutObject, s3:GetObject, s3:DeleteObject and s3:ListBucket"
            return ConfigError(FIELD, url, f"a bucket on which {KEY_VARIABLE} has {rights}; {self}")
        return ConfigError(FIELD, url, f"a store that speaks S3's API; {self}")


@dataclass(frozen=True)
class ObjectStoreLocation:
    """Where objects lie. ``endpoint``: scheme, host and port. ``prefix``: of all keys, ends with a slash unless empty."""

    endpoint: str
    bucket: str
    prefix: str
    region: str

    @property
    def url(self) -> str:
        return f"{self.endpoint}/{self.bucket}/{self.prefix}".rstrip("/")

    @classmethod
    def parse(cls, url: str, region: str, *, allow_http: bool = False) -> "ObjectStoreLocation":
        """Reads ``https://HOST/BUCKET[/PREFIX]``. Raises ConfigError for another form, and for http to another machine unless allowed."""
        form = "https://HOST[:PORT]/BUCKET[/PREFIX], without credentials, query or fragment"
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(FIELD, url, f"{form} ({error})") from None
        bucket, _, prefix = parts.path.lstrip("/").partition("/")
        if parts.username is not None or parts.password is not None:
            expected = f"{form}; credentials belong into {KEY_VARIABLE} and {SECRET_VARIABLE}"
            raise ConfigError(FIELD, f"{parts.scheme}://***@{host}", expected)
        if parts.scheme not in ("https", "http") or not host or parts.query or parts.fragment or port == 0:
            raise ConfigError(FIELD, url, form)
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", bucket):
            raise ConfigError(FIELD, url, f"{form}; a bucket is 3 to 63 lower-case letters, digits, '.' and '-'")
        if not re.fullmatch(r"(?:(?!\.{1,2}(?:/|$))[A-Za-z0-9._-]+(?:/|$))*", prefix):
            raise ConfigError(FIELD, url, f"{form}; a prefix is letters, digits, '.', '_', '-' between single slashes")
        if parts.scheme == "http" and not (allow_http or is_loopback(host)):
            raise ConfigError(FIELD, url, f"https, or {HTTP_FIELD} = true: weights and signatures would cross the network in clear")
        return cls(f"{parts.scheme}://{parts.netloc}", bucket, prefix.rstrip("/") + "/" if prefix.rstrip("/") else "", region)


def is_loopback(host: str) -> bool:
    """Returns whether a host of a URL is this machine's loopback interface."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class ObjectStoreCredentials:
    """Credentials of S3. ``token``: of temporary ones, else empty."""

    key: str
    secret: str
    token: str = ""

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> "ObjectStoreCredentials":
        """Reads the variables that all of S3's clients read. Raises ConfigError for one that is missing."""
        for name in (KEY_VARIABLE, SECRET_VARIABLE):
            if not environment.get(name):
                expected = "required in the trainer's environment with update_weight_transport = s3; replicas need none"
                raise ConfigError(name, environment.get(name), expected)
        return cls(environment[KEY_VARIABLE], environment[SECRET_VARIABLE], environment.get(TOKEN_VARIABLE, ""))


class S3Client:
    """Signs, writes, lists and removes objects below a location. Keys are relative to its prefix."""

    def __init__(self, location: ObjectStoreLocation, credentials: ObjectStoreCredentials, now: Callable[[], float] = time.time) -> None:
        self.location, self._credentials, self._now = location, credentials, now
        self._offset = 0.0  # the server's clock less this one, seconds

    def url(self, key: str, seconds: int, *, method: str = "GET", query: Mapping[str, str] | None = None) -> str:
        """Returns a URL that does ``method`` on an object for so many seconds, to whoever holds it. ``query``: further parameters, signed,
        too; those that begin with ``x-`` do nothing but stand in the store's access log. The empty key is the bucket."""
        place, given = self.location, self._credentials
        at = datetime.fromtimestamp(self._now() + self._offset, UTC)
        day, scope = f"{at:%Y%m%d}", f"{at:%Y%m%d}/{place.region}/s3/aws4_request"
        fields = {
            "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
            "X-Amz-Credential": f"{given.key}/{scope}",
            "X-Amz-Date": f"{at:%Y%m%dT%H%M%SZ}",
            "X-Amz-Expires": str(seconds),
            "X-Amz-SignedHeaders": "host",
            **({"X-Amz-Security-Token": given.token} if given.token else {}),
            **(query or {}),
        }
        path = "/" + quote(f"{place.bucket}/{place.prefix if key else ''}{key}", safe="/-_.~")
        pairs = sorted((quote(name, safe="-_.~"), quote(value, safe="-_.~")) for name, value in fields.items())
        text = "&".join(f"{name}={value}" for name, value in pairs)
        canonical = f"{method}\n{path}\n{text}\nhost:{urlsplit(place.endpoint).netloc}\n\nhost\nUNSIGNED-PAYLOAD"
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        signing = f"AWS4{given.secret}".encode()
        for part in (day, place.region, "s3", "aws4_request", f"AWS4-HMAC-SHA256\n{fields['X-Amz-Date']}\n{scope}\n{digest}"):
            signing = hmac.digest(signing, part.encode(), "sha256")
        return f"{place.endpoint}{path}?{text}&X-Amz-Signature={signing.hex()}"

    def put(self, key: str, data: bytes, deadline: float) -> None:
        """Writes an object; one that is there is replaced. Raises ObjectStoreRefused, DeadlineExceeded."""
        self._request("PUT", key, deadline, data)

    def remove(self, key: str) -> None:
        """Removes an object; an absent one is no error. Raises as `put`."""
        with contextlib.suppress(ObjectGone):
            self._request("DELETE", key, REQUEST_SECONDS)

    def listed(self) -> Iterator[str]:
        """Yields the keys of all objects below the prefix. Raises as `put`."""
        after = ""
        while True:
            query = {"list-type": "2", "prefix": self.location.prefix, **({"start-after": after} if after else {})}
            answer = self._request("GET", "", REQUEST_SECONDS, query=query).decode(errors="replace")
            found = [unescape(key) for key in re.findall(r"<Key>([^<]*)</Key>", answer)]
            yield from (key.removeprefix(self.location.prefix) for key in found)
            if "<IsTruncated>true</IsTruncated>" not in answer or not found:
                return
            after = found[-1]

    def probe(self) -> None:
        """Writes, reads, lists and removes a small object. Raises ConfigError, by the field that is wrong."""
        key, content = f"probe-{secrets.token_hex(8)}", secrets.token_bytes(64)
        try:
            self.put(key, content, PROBE_SECONDS)
            download(lambda: self.url(key, SIGNED_SECONDS), len(content), blake3(content).hexdigest(), PROBE_SECONDS)
            if key not in self.listed():
                raise ConfigError(FIELD, self.location.url, "a store that lists what was just written")
            self.remove(key)
        except ObjectStoreRefused as error:
            raise error.as_config_error(self.location) from error
        except ObjectGone as error:  # of a bucket, where the store has no word for that
            raise ConfigError(FIELD, self.location.url, f"a bucket that is there ({error})") from error
        except (DeadlineExceeded, ObjectCorrupt) as error:
            raise ConfigError(FIELD, self.location.url, f"an object store that answers from here; {error}") from error

    def _request(self, method: str, key: str, deadline: float, data: bytes = b"", query: Mapping[str, str] | None = None) -> bytes:
        """Returns the answer's body."""

        def attempt() -> bytes:
            pieces = (data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES))  # each has the socket's time
            request = urllib.request.Request(self.url(key, SIGNED_SECONDS, method=method, query=query), pieces, method=method)
            request.add_header("Content-Type", "application/octet-stream")
            request.add_header("Content-Length", str(len(data)))
            with _opened(request, self._note_time) as answer:
                return answer.read(MAX_ANSWER)

        return _retried(f"{method} {key or 'the bucket'}", deadline, attempt)

    def _note_time(self, date: str | None) -> None:
        with contextlib.suppress(TypeError, ValueError):
            server = parsedate_to_datetime(date or "").timestamp()
            if abs(server - self._now() - self._offset) > 2.0:  # the header has whole seconds
                self._offset = server - self._now()


def download(url: Callable[[], str], size: int, digest: str, deadline: float) -> bytes:
    """Returns an object of ``size`` bytes whose BLAKE3 is ``digest``. A broken connection is continued where it broke.

    Args:
        url: returns a pre-signed URL; called for each attempt, since one may expire. deadline: seconds.

    Raises ObjectGone, ObjectCorrupt (twice in a row), ObjectStoreRefused, DeadlineExceeded.
    """
    got, wrong = bytearray(), 0

    def attempt() -> bytes:
        nonlocal wrong
        request = urllib.request.Request(url())
        if got:
            request.add_header("Range", f"bytes={len(got)}-")
        with _opened(request) as answer:
            if got and answer.status != http.client.PARTIAL_CONTENT:
                got.clear()  # the server does not continue
            whole = len(got) + int(answer.headers.get("Content-Length") or size - len(got)) == size
            while whole and (piece := answer.read1(PIECE_BYTES)):
                got.extend(piece)
        if whole and len(got) < size:
            raise http.client.IncompleteRead(b"", size - len(got))
        if not whole or blake3(got, max_threads=blake3.AUTO).hexdigest() != digest:
            got.clear()
            wrong += 1
            error = ObjectCorrupt(f"object {digest} is not what it is called after")
            raise error if wrong > 1 else http.client.HTTPException(str(error))
        return bytes(got)

    return _retried(f"object {digest}", deadline, attempt)


def _retried(what: str, deadline: float, attempt: Callable[[], Result]) -> Result:
    """Returns what ``attempt`` does, tried again while the store is away, overloaded, or of another time. Raises as `download`."""
    end, pause, skewed = time.monotonic() + deadline, RETRY_PAUSE[0], 0
    while True:
        try:
            return attempt()
        except ObjectStoreRefused as error:
            skewed += (timing := error.code in ("RequestTimeTooSkewed", "RequestExpired", "AccessDenied") and error.status == 403)
            if not (error.status in (408, 429) or (error.status >= 500 and error.status != 507) or (timing and skewed < 3)):
                raise
            failure: Exception = error
        except _BROKEN as error:
            if isinstance(getattr(error, "reason", error), ssl.SSLCertVerificationError):
                untrusted = f"its certificate is not trusted; name the authority's file in {CA_VARIABLE}"
                raise ObjectStoreRefused(what, 0, untrusted, str(error)) from None
            failure = error
        if time.monotonic() + pause > end:
            raise DeadlineExceeded(what, "the object store", deadline, f"given up ({failure})") from failure
        time.sleep(pause)
        pause = min(2 * pause, RETRY_PAUSE[1])


@contextlib.contextmanager
def _opened(
    request: urllib.request.Request, note_time: Callable[[str | None], None] = lambda _: None
) -> Iterator[http.client.HTTPResponse]:
    """Opens an answer. Raises ObjectGone, ObjectStoreRefused, and what a broken connection raises."""
    path, what = urlsplit(request.full_url).path, request.get_method()
    try:
        context = trusted(authorities()) if request.type == "https" else None
        with urllib.request.urlopen(request, timeout=SOCKET_SECONDS, context=context) as answer:
            note_time(answer.headers.get("Date"))
            yield answer
    except urllib.error.HTTPError as error:
        with error:
            note_time(error.headers.get("Date"))
            text = error.read(MAX_ANSWER).decode(errors="replace")
        found = {name: unescape(value) for name, value in re.findall(r"<(Code|Message|Region)>([^<]*)</", text)}
        code = found.get("Code", "")
        if error.code == http.client.NOT_FOUND and code != "NoSuchBucket":
            raise ObjectGone(f"the object store holds no {path}") from None
        region = found.get("Region") or error.headers.get("x-amz-bucket-region") or ""
        raise ObjectStoreRefused(f"{what} {path}", error.code, code, found.get("Message", ""), region) from None
