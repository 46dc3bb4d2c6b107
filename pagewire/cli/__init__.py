"""The `pagewire` command: modules of verbs, apart from the client library that most verbs use.

Importing this package loads no gRPC, since the command makes settings that gRPC reads when it is imported. For the same
reason four modules are used beside what is named here: `connection`, the flags that say which server to talk to;
`client_flags`, other flags of client verbs; `chat`, for its `Conversation`; and `services`, for the options of
`pagewire serve`.
"""

from pagewire.cli.command import FAILURE, GRPC_EXPERIMENTS, INTERRUPTED, SUCCESS, USAGE, VERBS, main

__all__ = ["FAILURE", "GRPC_EXPERIMENTS", "INTERRUPTED", "SUCCESS", "USAGE", "VERBS", "main"]
