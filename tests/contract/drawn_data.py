"""Random dataclasses and protobuf messages. They are generated from the type's fields, so new fields are included."""

from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from random import Random
from types import NoneType
from typing import Any, get_args, get_origin

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

_SIZES = {
    FieldDescriptor.TYPE_UINT32: (0, 2**32),
    FieldDescriptor.TYPE_UINT64: (0, 2**64),
    FieldDescriptor.TYPE_FIXED64: (0, 2**64),
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63),
}


def drawn_data(data_type: type[Any], message_type: type[Message], rng: Random, default_share: float = 0.0) -> Any:
    """Return an instance of a dataclass with random values that its message can represent.

    Fields that have a default keep it with the probability `default_share`. All other fields get another value.
    """
    descriptors = message_type.DESCRIPTOR.fields_by_name
    chosen = [field for field in fields(data_type) if field.default is MISSING or rng.random() >= default_share]
    return data_type(
        **{field.name: _value(field.type, descriptors[field.name], rng, default_share) for field in chosen}
    )


def drawn_message(message_type: type[Message], rng: Random) -> Any:
    """Return a message in which every field is set, except that one field of each oneof is set."""
    message = message_type()
    for descriptor in message_type.DESCRIPTOR.fields:
        value = getattr(message, descriptor.name)
        if descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry:
            key, entry = descriptor.message_type.fields
            value[_number_or_text(key, rng)] = _number_or_text(entry, rng)
        elif isinstance(value, Message):
            value.CopyFrom(drawn_message(GetMessageClass(descriptor.message_type), rng))
        elif isinstance(value, int | float | str | bytes):
            setattr(message, descriptor.name, _number_or_text(descriptor, rng))
        elif descriptor.message_type is not None:
            value.extend(drawn_message(GetMessageClass(descriptor.message_type), rng) for _ in range(2))
        else:
            value.extend(_number_or_text(descriptor, rng) for _ in range(rng.randint(1, 40)))
    return message


def _value(hint: Any, descriptor: FieldDescriptor, rng: Random, default_share: float) -> Any:
    if get_origin(hint) is tuple:
        one = get_args(hint)[0]
        return tuple(_value(one, descriptor, rng, default_share) for _ in range(rng.randint(1, 40)))
    if NoneType in get_args(hint):
        (hint,) = set(get_args(hint)) - {NoneType}
    if isinstance(hint, type) and is_dataclass(hint):
        return drawn_data(hint, GetMessageClass(descriptor.message_type), rng, default_share)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return rng.choice(list(hint))
    return _number_or_text(descriptor, rng)


def _number_or_text(descriptor: FieldDescriptor, rng: Random) -> Any:
    match descriptor.type:
        case FieldDescriptor.TYPE_BOOL:
            return True
        case FieldDescriptor.TYPE_STRING:
            return rng.choice(["a", "é😀", "x" * 300])
        case FieldDescriptor.TYPE_BYTES:
            return rng.randbytes(32)
        case FieldDescriptor.TYPE_FLOAT:
            return float(np.float32(rng.choice([rng.uniform(-100, 100), 3e38, -1e-38, float("inf")])))
        case FieldDescriptor.TYPE_DOUBLE:
            return rng.choice([rng.uniform(0, 1e15), 1e-3])
        case FieldDescriptor.TYPE_ENUM:
            return rng.choice([value.number for value in descriptor.enum_type.values if value.number])
    low, high = _SIZES[descriptor.type]
    return rng.choice([value for value in (1, 300, high - 1, low, rng.randrange(low, high)) if value])
