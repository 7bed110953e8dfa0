"""The executor of kind "systemd": each job is a transient service unit in ``cpumond-jobs.slice``.

Over the system bus, and as root only: who may start units may do anything. The unit outlives the agent, and its result
stays readable (RemainAfterExit) until it was taken. What a job writes goes to the journal: journald's own limits on
size and rate hold there instead of ``Launch``'s bounds. A job's command, environment and user can be seen by every
user of the host (``systemctl show``), but for ``Launch.secrets``, which go by ``secrets.py``.
"""
