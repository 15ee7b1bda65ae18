"""All-reduce algorithms, one file each: (rank, number of processes, number of elements) -> steps."""
