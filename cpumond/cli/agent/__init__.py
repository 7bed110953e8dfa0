"""Commands of the agent, and commands about limits that need no agent."""
