// A library that says that it is UCX 1.MINOR, and has nothing else.
void ucp_get_version(unsigned* major, unsigned* minor, unsigned* release);
const char* ucp_get_version_string(void);

void ucp_get_version(unsigned* major, unsigned* minor, unsigned* release) {
  *major = 1;
  *minor = MINOR;
  *release = 0;
}

const char* ucp_get_version_string(void) {
  return MINOR == 12 ? "1.12.0" : "1.13.0";
}
