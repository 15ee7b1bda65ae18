"""The timed parts of study 4: what processes of a launch do, and the page's sections made of their figures."""
