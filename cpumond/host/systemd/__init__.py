"""systemd over D-Bus: limits of units as properties that systemd sets."""
