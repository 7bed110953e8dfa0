"""The executor of kind "systemd": each job is a transient service unit in ``cpumond-jobs.slice``.

It uses the system bus and needs root: a user who may start units may do anything. The unit outlives the agent, and its
result stays readable (RemainAfterExit) until the executor has read it. A job's output goes to the journal, whose own
limits on size and rate replace ``Launch``'s bounds. A job's command, environment and user are visible to every user of
the host (``systemctl show``), except for ``Launch.secrets``, which use ``secrets.py``."""
