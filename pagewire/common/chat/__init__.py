"""Chats: rendering a conversation by its template, and reading tool calls and reasoning in the output."""
