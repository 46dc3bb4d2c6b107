"""The error of a refusal in each API: each reason has a gRPC status code and an HTTP status, and each
fault a reason.
"""

import ast
import re
from http import HTTPStatus

import grpc

from scheduler_service.api.authentication import set_status
from scheduler_service.core.request import AdmissionReason, EndReason
from scheduler_service.serving.observer import NON_FAILURES
from scheduler_service.serving.refusal import MAX_MESSAGE_BYTES, OF_ADMISSION, OF_END, Reason, RefusedError
from testing.sources import parse, sources, walk

REFUSALS = ("invalid", "RefusedError", "HttpRefusal")
CLIENT_CLOSED_REQUEST = 499  # used by nginx, in no standard


class Call:
    """A fake RPC context that records the status with which a refusal ends the RPC."""

    def set_trailing_metadata(self, metadata: object) -> None:
        self.metadata = metadata

    def set_details(self, details: str) -> None:
        self.details = details

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code


def test_each_reason_is_the_grpc_code_of_its_name() -> None:
    for reason in Reason:
        assert grpc.StatusCode[reason.name].value[0] == reason.grpc_code
        call = Call()
        set_status(call, RefusedError(reason, "no", "field"))
        assert (call.code.name, call.details) == (reason.name, "no")


def test_each_reason_has_the_http_status_of_an_error() -> None:
    statuses = {reason.http_status for reason in Reason}
    assert all(status >= 400 for status in statuses)
    assert statuses - {CLIENT_CLOSED_REQUEST} <= set(HTTPStatus)


def test_each_fault_has_a_reason() -> None:
    assert OF_ADMISSION.keys() == set(AdmissionReason)
    assert OF_END.keys() == set(EndReason) - set(NON_FAILURES)


def test_each_refusal_says_what_to_do() -> None:
    """The text of a refusal ends with advice, or names the accepted values. Ended requests need no advice."""
    advice = re.compile(r"[;:]|must |send |see ")
    for path in sources("scheduler_service"):
        for node in walk(parse(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in REFUSALS:
                message = node.args[1]
                if isinstance(message, ast.JoinedStr) and isinstance(message.values[-1], ast.FormattedValue):
                    continue  # the end of the text is in a variable
                parts = [part.value for part in ast.walk(message) if isinstance(part, ast.Constant)]
                text = "".join(part for part in parts if isinstance(part, str))
                is_of_end = re.search("disconnected|aborted|no profiler to stop", text)
                assert is_of_end or len(text) < 10 or advice.search(text), f"{path}:{node.lineno}: {text}"


def test_a_long_message_is_cut_to_whole_characters() -> None:
    assert str(RefusedError(Reason.INTERNAL, "ä" * MAX_MESSAGE_BYTES)) == "ä" * (MAX_MESSAGE_BYTES // 2)
