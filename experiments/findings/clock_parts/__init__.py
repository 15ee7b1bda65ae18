"""The parts of study 5: its settings, its chosen methods, what processes of a launch do, and the page's section."""
