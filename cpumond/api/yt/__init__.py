"""The `yt` protocol (yt_protocol.md): transport, formats, paths and commands."""
