/** The dashboard. */
document.title = "Ferry";
