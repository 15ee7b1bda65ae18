"""One stage's work: what each action of a schedule does to its module, its weights and its optimizer."""
