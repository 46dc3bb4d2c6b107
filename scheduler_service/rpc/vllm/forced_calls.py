"""The JSON Schema by which gateways ask for calls of tools where `tool_choice` is "required". This is pure."""

import json

# How the gateway's list of calls begins, each an object with the name of a tool and its parameters.
_BEGINNING = '{"type":"array","minItems":1,"items":{"type":"object","anyOf":[{"properties":{"name":'
_MAX_LENGTH = 512 * 1024  # of a schema that is served


def close_calls(schema: str) -> str:
    """Return a list of calls with nothing in a call but its name and parameters, and any other schema as it is.

    The gateway reads such calls alone, though its schema leaves room for more: what else stood in one would make text
    of all of them.
    """
    if not schema.startswith(_BEGINNING) or len(schema) > _MAX_LENGTH:
        return schema
    try:
        calls = json.loads(schema)
        for call in calls["items"]["anyOf"]:
            if set(call) != {"properties", "required"} or set(call["properties"]) != {"name", "parameters"}:
                return schema
            call["additionalProperties"] = False
        return json.dumps(calls, allow_nan=False)
    except (ValueError, LookupError, TypeError, RecursionError):
        return schema  # is refused where schemas are read
