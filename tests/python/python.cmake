# The Python packages (client/python, client/deep_ep) by pytest, against a real daemon on host devices. Debian's python3
# first: numpy, torch and pytest come as its packages.
find_program(EPD_PYTHON NAMES python3 PATHS /usr/bin NO_DEFAULT_PATH DOC "Python 3.9 or later, with pytest and numpy")
find_program(EPD_PYTHON NAMES python3)

include(${CMAKE_CURRENT_SOURCE_DIR}/support/daemon_lock.cmake)
epd_daemon_lock(python _lock)

# A library with a sanitizer can't be loaded into a python without.
if(EPD_PYTHON AND NOT EPD_SANITIZE)
  foreach(_part abi imports errors lifetimes interrupts memory programs round_trips threads cuda wheel torch torch_ops deep_ep deep_ep_shrink deep_ep_parts)
    add_test(NAME python.${_part}
      COMMAND ${EPD_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/run.py ${CMAKE_CURRENT_LIST_DIR}/test_${_part}.py)
    set_tests_properties(python.${_part} PROPERTIES
      LABELS python TIMEOUT 180 SKIP_RETURN_CODE 77 ${_lock}
      ENVIRONMENT "EPD_BUILD_DIR=${PROJECT_BINARY_DIR};EPD_LIBRARY=$<TARGET_FILE:epd_client>")
  endforeach()
  set_tests_properties(python.deep_ep python.deep_ep_shrink PROPERTIES TIMEOUT 400)  # rank processes load torch
  set_tests_properties(python.wheel PROPERTIES LABELS "python;nightly" TIMEOUT 400)  # of which a virtual environment may take two minutes
endif()
