"""The executor of kind "slurm": each job is a batch job of Slurm, in a partition that is there for it.

The scheduler has decided when a job comes here: Slurm gets it by ``sbatch``, as the job's user, for one node, and runs
``keeper.step`` in the cgroup that it makes. How the job begins and ends is told by that step to the keeper, and by the
keeper to the agent. Slurm's controller is asked only about jobs that say nothing, and told by ``scancel``: while it is
away jobs run, end and can be killed, and those to be started wait for it.

Jobs keep the place and the weight that Slurm gives them, and always have their order as a quota: ``Launch.reclaimed``
and ``Launch.has_ceiling`` change nothing here, and there is no idle class.
"""
