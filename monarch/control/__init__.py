"""Talking to a running daemon through its socket: the messages, the server and the client."""
