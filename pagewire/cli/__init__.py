"""The `pagewire` command. Each verb is in a module of its own.

Importing this package does not load gRPC, because the command sets environment variables that gRPC reads when it is
imported. For the same reason, other packages import five of the modules directly: `connection` (the flags that select a
server), `client_flags` (other flags of client verbs), `chat` (the class `Conversation`), `services` (the options of
`pagewire serve`), and `figures` (the notation of figures in tables).
"""

from pagewire.cli.command import FAILURE, GRPC_EXPERIMENTS, INTERRUPTED, SUCCESS, USAGE, VERBS, main

__all__ = ["FAILURE", "GRPC_EXPERIMENTS", "INTERRUPTED", "SUCCESS", "USAGE", "VERBS", "main"]
