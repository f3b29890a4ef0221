"""Really brings the container deployment up, breaks it under load, and takes it down: ./task test:compose."""
