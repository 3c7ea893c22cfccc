"""What every room needs and none owns: the user's error, the launch environment, durable files, progress bars."""
