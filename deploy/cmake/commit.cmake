# Writes the header OUTPUT with the commit of the folder SOURCE, or COMMIT if it is not empty. Run with each build; the
# file is written only if its text is another one.
cmake_minimum_required(VERSION 3.25)
set(_commit "${COMMIT}")
if(_commit STREQUAL "")
  execute_process(COMMAND git -C ${SOURCE} describe --always --dirty --abbrev=12 --exclude=*
    OUTPUT_VARIABLE _commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(_commit STREQUAL "")
  set(_commit "unknown")
endif()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT "#define EPD_COMMIT \"@_commit@\"\n" @ONLY)
