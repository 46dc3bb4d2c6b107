"""The messages between services, their translation to and from protobuf, and their transport."""
