"""The process around the service: configuration, sockets, metrics, the lead, systemd."""
