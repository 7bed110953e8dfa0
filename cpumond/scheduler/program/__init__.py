"""The process that runs the service: configuration, sockets, metrics, the lead, systemd."""
