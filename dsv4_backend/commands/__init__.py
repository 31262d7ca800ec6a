"""The commands of `dsv4`, a file each."""
