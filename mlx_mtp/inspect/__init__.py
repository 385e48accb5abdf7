"""The commands `inspect`, `models`, `pull`, `ls`, `rm`, `ps`, and the memory that models need."""
