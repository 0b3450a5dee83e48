"""What a mount shows and promises, asked through the kernel and compared with the source."""
