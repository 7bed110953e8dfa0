// The page of one node's agent: its jobs, to look at.

import { start } from "./app.js";
import { installKeys } from "./keys.js";
import { agentJob, agentJobs } from "./page_agent.js";

installKeys();

start({
  name: "cpumond agent", menu: [["Jobs", "#/", ["", "jobs"]]],
  pages: [[[], agentJobs], [["jobs", "*job"], agentJob]],
});
