"""A repository that several API processes serve: the supervisor has it, and the processes call the supervisor."""
