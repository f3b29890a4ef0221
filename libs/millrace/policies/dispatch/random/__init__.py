"""Random: any candidate, each as likely as the others."""
