"""A `grpcurl` line of a document, carried out as that program does it, by reflection and JSON."""

import re
import shlex
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

_PARSER = ArgumentParser("grpcurl", allow_abbrev=False)
_PARSER.add_argument("-plaintext", action="store_true", required=True)
_PARSER.add_argument("-d", dest="data", required=True)
_PARSER.add_argument("address")
_PARSER.add_argument("method")


def lines_of(document: Path) -> list[str]:
    """Every command that begins with `grpcurl`, with the lines that it goes on in: those that are indented."""
    return re.findall(r"^grpcurl .*(?:\n .*)*", document.read_text(), re.MULTILINE)


def run(line: str, address: str) -> list[dict[str, Any]]:
    """The messages that the server at `address`, in place of the line's own, answers. Raises grpc.RpcError."""
    arguments = _PARSER.parse_args(shlex.split(line)[1:])
    service_name, _, method_name = arguments.method.rpartition("/")
    with grpc.insecure_channel(address) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        method = pool.FindServiceByName(service_name).FindMethodByName(method_name)
        request = json_format.Parse(arguments.data, message_factory.GetMessageClass(method.input_type)())
        make = channel.unary_stream if method.server_streaming else channel.unary_unary
        answer = make(
            f"/{arguments.method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )(request)
        messages = answer if method.server_streaming else [answer]
        return [json_format.MessageToDict(message, preserving_proto_field_name=True) for message in messages]
