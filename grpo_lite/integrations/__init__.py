"""The governor in other people's trainers, one file each."""
