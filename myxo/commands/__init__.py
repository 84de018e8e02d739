"""One module for each command that looks at a run or helps with one."""
