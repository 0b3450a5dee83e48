"""The control socket of a running daemon: the messages, the server and the client."""
