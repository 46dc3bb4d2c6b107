"""Translation of frozen dataclasses to and from protobuf messages, by tables that are built once from the fields of
both.

A field that both sides have is translated according to the dataclass's type of the field. Every other field must be
listed in `apart`. A field that only one side has is otherwise a TypeError when the table is built.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from operator import attrgetter
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet

Data = TypeVar("Data")
SomeMessage = TypeVar("SomeMessage", bound=Message)
Convert = Callable[[Any], Any]


def decoder(
    data_type: type[Data],
    message_type: type[Message],
    converted: Mapping[str, Convert] | None = None,
    apart: Collection[str] = (),
) -> Callable[..., Data]:
    """Return a function that converts a protobuf message to an instance of a dataclass. The function does not convert
    the fields in `apart`. The caller passes the dataclass's fields among them as keyword arguments.

    A field that is not set in the message gets the dataclass's default, or None. An enum's members must have the
    numbers in the message as values. The function raises ValueError for an unknown number. `converted` has a conversion
    function for each field whose type does not determine the conversion.
    """
    always: list[tuple[str, Convert]] = []
    absent: dict[str, Any] = {}
    present: dict[int, tuple[str, Convert | None]] = {}
    for field, convert, default in _columns(data_type, message_type, decoder, converted, apart):
        if convert is not None and (field.name in (converted or ()) or field.enum_type is not None):
            always.append((field.name, convert))
        else:
            present[field.number] = (field.name, convert)
            nothing = getattr(message_type(), field.name)
            absent[field.name] = default if default is not MISSING else convert(nothing) if convert else nothing

    def decode(message: Message, **others: Any) -> Data:
        values = absent | others
        for descriptor, value in message.ListFields():  # the fields that are set
            if column := present.get(descriptor.number):
                name, convert = column
                values[name] = value if convert is None else convert(value)
        for name, convert in always:
            values[name] = convert(getattr(message, name))
        return data_type(**values)

    return decode


def encoder(
    data_type: type[Any], message_type: type[SomeMessage], apart: Collection[str] = ()
) -> Callable[[Any], SomeMessage]:
    """Return a function that converts an instance of a dataclass to a protobuf message.

    A field of the message stays unset if its value is None, if its value is a dataclass equal to the field's default,
    or if the field is in `apart`.
    """
    columns = list(_columns(data_type, message_type, encoder, apart=apart))
    names, empty = [field.name for field, _, _ in columns], ()
    conversions = [(field.name, convert, absent) for field, convert, absent in columns if convert is not None]

    def encode(data: Any) -> SomeMessage:
        values = {name: value for name in names if (value := getattr(data, name)) is not empty}
        for name, convert, absent in conversions:
            if name in values:
                values[name] = None if values[name] == absent else convert(values[name])
        return message_type(**values)

    return encode


def enum_names(descriptor: EnumDescriptor) -> dict[int, str]:
    """Return the names of a protobuf enum's values by number, in lower case and without their common prefix. The
    unspecified value is left out.
    """
    prefix = descriptor.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return {value.number: value.name.removeprefix(prefix).lower() for value in descriptor.values if value.number}


def unknown_field(message: Message) -> str | None:
    """Return a description of a field in a protobuf message that this version does not know, or None. Nested messages
    are searched too.
    """
    if len(unknown := UnknownFieldSet(message)):
        name, number = message.DESCRIPTOR.full_name, unknown[0].field_number
        return f"{name} has a field that this version does not know, number {number}"
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None:
            for part in (value,) if isinstance(value, Message) else value:
                if found := unknown_field(part):
                    return found
    return None


def _columns(
    data_type: type[Any],
    message_type: type[Message],
    nested: Callable[..., Convert],
    converted: Mapping[str, Convert] | None = None,
    apart: Collection[str] = (),
) -> Iterator[tuple[FieldDescriptor, Convert | None, Any]]:
    """Yield the fields that a dataclass and a protobuf message share, as tuples of three: the field, its conversion
    function, and the value for an unset field.

    The function is None if values need no conversion. The value is MISSING if the message cannot show that the field is
    unset. `nested` (`decoder` or `encoder`) creates the conversion of nested messages. `apart` must name the fields
    that only the dataclass or only the message has; otherwise TypeError is raised.
    """
    ours = {field.name: field for field in fields(data_type)}
    theirs = {field.name: field for field in message_type.DESCRIPTOR.fields}
    if wrong := set(ours) ^ set(theirs) ^ set(apart):
        names = ", ".join(sorted(wrong))
        raise TypeError(f"{data_type.__name__} and {message_type.DESCRIPTOR.full_name} differ in the fields {names}")
    for name, field in theirs.items():
        if name in ours:
            default = None if NoneType in get_args(ours[name].type) else ours[name].default
            convert = (converted or {}).get(name) or _conversion(ours[name].type, field, nested)
            yield field, convert, default if field.has_presence else MISSING


def _conversion(hint: Any, field: FieldDescriptor, nested: Callable[..., Convert]) -> Convert | None:
    options = [option for option in get_args(hint) if option not in (NoneType, Ellipsis)]
    if len(options) == 1:
        one = _conversion(options[0], field, nested)
        if get_origin(hint) is not tuple:
            return one
        if one is not None:
            return lambda values: tuple(map(one, values))
        return tuple if nested is decoder else None
    if is_dataclass(hint):
        return nested(hint, GetMessageClass(field.message_type))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint if nested is decoder else attrgetter("value")
    return None
