"""docs/openai_fields.md is what tests/system/test_openai_api.py sends, with every field of OpenAI's client."""

import re

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_completion_create_params
from openai.types.responses import response_create_params

from tests.system.openai_api.document import DOCUMENT, OPENAI_ROUTES, ROUTES, page
from tests.system.openai_api.field import Route

PARAMETERS = {
    "/v1/completions": completion_create_params.CompletionCreateParamsBase,
    "/v1/chat/completions": chat_completion_create_params.CompletionCreateParamsBase,
    "/v1/responses": response_create_params.ResponseCreateParamsBase,
}


def names_of(route: Route) -> set[str]:
    """Returns the names of a route's fields, without what a name says of the field's value, or of a part of it."""
    return {re.split(r"[.,]", field.name)[0] for field in route.fields}


def test_its_tables_are_those_of_the_tests() -> None:
    assert DOCUMENT.read_text() == page(), "run `make docs`"


@pytest.mark.parametrize("route", OPENAI_ROUTES, ids=lambda route: route.path)
def test_no_field_of_the_client_is_missing(route: Route) -> None:
    assert {*PARAMETERS[route.path].__annotations__, "stream"} <= names_of(route)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_no_field_is_told_twice(route: Route) -> None:
    names = [field.name for field in route.fields]
    assert len(names) == len(set(names))
