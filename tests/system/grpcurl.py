"""The parts of `grpcurl` that documents and examples use, implemented by reflection and JSON as in the program."""

import re
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

_PARSER = ArgumentParser("grpcurl", allow_abbrev=False)
_PARSER.add_argument("-plaintext", action="store_true", required=True)
_PARSER.add_argument("-d", dest="data", required=True)
_PARSER.add_argument("address")
_PARSER.add_argument("method")


def lines_of(document: Path) -> list[str]:
    """Return every command that begins with `grpcurl`, including its indented continuation lines."""
    return re.findall(r"^grpcurl .*(?:\n .*)*", document.read_text(), re.MULTILINE)


def run(line: str, address: str) -> list[dict[str, Any]]:
    """Return the response messages of the server at `address`, which replaces the address in the line.

    Raises grpc.RpcError.
    """
    arguments = _PARSER.parse_args(shlex.split(line)[1:])
    return [
        json_format.MessageToDict(message, preserving_proto_field_name=True)
        for message in _call(address, arguments.method, arguments.data)
    ]


def _call(address: str, name: str, data: str) -> Iterator[Message]:
    service_name, _, method_name = name.rpartition("/")
    with grpc.insecure_channel(address) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        method = pool.FindServiceByName(service_name).FindMethodByName(method_name)
        request = json_format.Parse(data, message_factory.GetMessageClass(method.input_type)())
        make = channel.unary_stream if method.server_streaming else channel.unary_unary
        answer = make(
            f"/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )(request)
        yield from answer if method.server_streaming else [answer]


def _list(address: str, service_name: str) -> list[str]:
    with grpc.insecure_channel(address) as channel:
        service = DescriptorPool(ProtoReflectionDescriptorDatabase(channel)).FindServiceByName(service_name)
        return sorted(f"{service_name}.{method.name}" for method in service.methods)


def install(folder: Path) -> None:
    """Create a program `grpcurl` in `folder` that runs this module, for scripts and documents that call it."""
    program = folder / "grpcurl"
    root = Path(__file__).parents[2]
    program.write_text(f'#!/bin/sh\ncd {shlex.quote(str(root))} && exec {sys.executable} -m {__name__} "$@"\n')
    program.chmod(0o755)


def main(arguments: Sequence[str]) -> None:
    if "list" in arguments:
        _, address, _, service_name = arguments
        print(*_list(address, service_name), sep="\n")
        return
    parsed = _PARSER.parse_args(arguments)
    for message in _call(parsed.address, parsed.method, parsed.data):
        print(json_format.MessageToJson(message))


if __name__ == "__main__":
    main(sys.argv[1:])
