# Writes the header OUTPUT with the commit of the folder SOURCE, or COMMIT if it is not empty, and with the version of
# the build: VERSION, and between releases the commit after it: "0.1.0+g229aa93f1c2d". A release is the tag vVERSION, or
# sources without a known commit. Run with each build; the file is written only if its text is another one.
cmake_minimum_required(VERSION 3.25)
set(_commit "${COMMIT}")
set(_release FALSE)
if(_commit STREQUAL "")
  execute_process(COMMAND git -C ${SOURCE} describe --always --dirty --abbrev=12 --exclude=*
    OUTPUT_VARIABLE _commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  execute_process(COMMAND git -C ${SOURCE} describe --tags --dirty --exact-match --match v${VERSION}
    OUTPUT_VARIABLE _tag OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(_tag STREQUAL "v${VERSION}")
    set(_release TRUE)
  endif()
endif()
if(_commit STREQUAL "")
  set(_commit "unknown")
  set(_release TRUE)
endif()
set(_version "${VERSION}")
if(NOT _release)
  string(TOLOWER "${_commit}" _local)  # the letters that PEP 440 and Debian allow
  string(REGEX REPLACE "[^a-z0-9]+" "." _local "${_local}")
  string(APPEND _version "+g${_local}")
endif()
file(CONFIGURE OUTPUT ${OUTPUT} @ONLY CONTENT
"#define EPD_COMMIT \"@_commit@\"
#define EPD_BUILD_VERSION \"@_version@\"
")
