"""systemd over D-Bus: the limits of units as its properties."""
