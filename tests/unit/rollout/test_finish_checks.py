"""The end of a request that is aborted in the very step that ends it, and the versions of its tokens; the class is SGLang's in its order of
questions."""

import pytest

from services.rollout.engine.receiver.loader import find_ends_of_aborted, report_token_versions
from shared.schema.versions import TOKEN_VERSIONS
from tests.support.tables import table

END = 7


def request_class(name: str) -> type:
    class Request:
        def __init__(self, tokens: list[int], abort: str | None) -> None:
            self.output_ids, self.to_finish, self.reason = tokens, abort, ""

        def finished(self) -> bool:
            return bool(self.reason)

        def check(self, new: int = 1) -> None:
            if self.finished():
                return
            if self.to_finish is not None:
                self.reason, self.to_finish = self.to_finish, None
            elif END in self.output_ids[-new:]:
                self.reason = "stop"

    setattr(Request, name, Request.check)
    return Request


@table("name", ["update_finish_state", "check_finished"])
@table(
    ("tokens", "abort", "reason"),
    [([1, END], "abort", "stop"), ([1, 2], "abort", "abort"), ([], "abort", "abort"), ([1, END], None, "stop"), ([1, 2], None, "")],
)
def test_an_end_is_an_end(name: str, tokens: list[int], abort: str | None, reason: str) -> None:
    kind = request_class(name)
    assert find_ends_of_aborted(kind)
    request = kind(tokens, abort)
    getattr(request, name)(1)
    assert request.reason == reason
    getattr(request, name)(1)
    assert request.reason == reason, "what has ended stays as it is"


def test_a_class_without_such_a_check_is_left_alone() -> None:
    assert not find_ends_of_aborted(object)


@pytest.mark.parametrize("name", ["update_finish_state", "check_finished"])
def test_each_token_is_noted_with_the_version_that_is_held_when_it_is_appended(name: str) -> None:
    kind, held = request_class(name), [-1]
    assert find_ends_of_aborted(kind) and report_token_versions(kind, lambda: held[0])
    request = kind([], None)
    for version, token in ((-1, 1), (3, 2), (3, 3), (4, END)):
        held[0] = version
        request.output_ids.append(token)
        getattr(request, name)(1)
    assert request.customized_info == {TOKEN_VERSIONS: [None, 3, 3, 4]} and request.reason == "stop"
    assert not report_token_versions(type("Unlike", (), {}), lambda: 0)
