"""This host: cgroups, systemd, what starts jobs, the service that a program is, connections that it takes."""
