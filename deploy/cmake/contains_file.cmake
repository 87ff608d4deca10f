# Fails unless the text of EXAMPLE occurs in README.
file(READ ${README} _readme)
file(READ ${EXAMPLE} _example)
string(FIND "${_readme}" "${_example}" _at)
if(_at EQUAL -1)
  message(FATAL_ERROR "${README} does not contain ${EXAMPLE} as it is now")
endif()
