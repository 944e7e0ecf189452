"""What a compilation did, in the forms that people read: code, pages, tables, files."""
