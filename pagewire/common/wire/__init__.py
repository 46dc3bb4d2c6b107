"""The wire: the messages between services, their translation, and transport."""
