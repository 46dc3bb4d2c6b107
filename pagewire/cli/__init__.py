"""The `pagewire` command: one module for each verb, apart from the client library that most verbs use.

Importing this package loads no gRPC, since the command makes settings that gRPC reads when it is imported. Benchmarks
use `connection` beside what is named here: the flags that say which server to talk to.
"""

from pagewire.cli.command import FAILURE, GRPC_EXPERIMENTS, INTERRUPTED, SUCCESS, USAGE, VERBS, main

__all__ = ["FAILURE", "GRPC_EXPERIMENTS", "INTERRUPTED", "SUCCESS", "USAGE", "VERBS", "main"]
