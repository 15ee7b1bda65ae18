"""How the processes of a job find each other: on one machine, and over several."""
