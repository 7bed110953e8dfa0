// The page of one node's agent: its jobs, to look at.

import { start } from "./app.js";
import { agentJob, agentJobs } from "./page_agent.js";

start({
  name: "cpumond agent",
  menu: [["Jobs", "#/", ["", "jobs"]]],
  pages: [
    [[], agentJobs],
    [["jobs", "*job"], agentJob],
  ],
});
