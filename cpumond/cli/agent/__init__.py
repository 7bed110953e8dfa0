"""Commands of the agent, and of limits without one."""
