# Debian packages by CPack: epd (component daemon), libepd1 (client), libepd-dev (client-dev), python3-epd (python).
# deploy/package.sh makes them.
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME epd)
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_PACKAGE_VENDOR epd)
# A distributor of the packages sets an address at which users can ask.
set(EPD_MAINTAINER "The authors of epd <epd@localhost>" CACHE STRING "Maintainer of the Debian packages: NAME <ADDRESS>")
set(CPACK_PACKAGE_CONTACT "${EPD_MAINTAINER}")
set(CPACK_DEBIAN_PACKAGE_RELEASE 1)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
# Below /usr, except for /etc.
set(CPACK_SET_DESTDIR ON)
set(CPACK_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS
  OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_COMPONENTS_ALL daemon client client-dev python)

# libepd answers for its symbols by the version that has the same interface; the daemon and its library are updated
# together, because a client attaches only to a daemon with the same layout of shared memory.
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${CMAKE_LIBRARY_OUTPUT_DIRECTORY})
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS_POLICY "=")
set(CPACK_DEBIAN_ENABLE_COMPONENT_DEPENDS ON)
set(CPACK_COMPONENT_DAEMON_DEPENDS client)
set(CPACK_COMPONENT_CLIENT-DEV_DEPENDS client)
set(CPACK_COMPONENT_PYTHON_DEPENDS client)

set(CPACK_DEBIAN_DAEMON_PACKAGE_NAME epd)
set(CPACK_DEBIAN_DAEMON_PACKAGE_SECTION admin)
set(CPACK_DEBIAN_DAEMON_PACKAGE_DEPENDS "systemd | systemd-standalone-sysusers, init-system-helpers (>= 1.54)")
# UCX, for groups that span nodes; engines open it at run time.
set(CPACK_DEBIAN_DAEMON_PACKAGE_RECOMMENDS "libucx0")
set(CPACK_DEBIAN_DAEMON_PACKAGE_SUGGESTS "nvidia-cuda-mps, iproute2, openssl, ucx-utils")
# The first line of each is its short description.
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "")
set(CPACK_COMPONENT_DAEMON_DESCRIPTION "expert-parallel communication daemon
One daemon for each node carries out dispatch and combine of
Mixture-of-Experts models for processes that link libepd. This package has
the daemon, its service, epctl to look at it and operate it, the benchmark
epbench, the documents and the examples.")
set(CPACK_DEBIAN_CLIENT_PACKAGE_NAME libepd1)
set(CPACK_DEBIAN_CLIENT_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_CLIENT_PACKAGE_CONTROL_EXTRA ${CMAKE_CURRENT_LIST_DIR}/triggers)
set(CPACK_COMPONENT_CLIENT_DESCRIPTION "expert-parallel communication daemon - client library
Processes that link libepd attach to epd, the daemon of their node.")
set(CPACK_DEBIAN_CLIENT-DEV_PACKAGE_NAME libepd-dev)
set(CPACK_DEBIAN_CLIENT-DEV_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_CLIENT-DEV_PACKAGE_SUGGESTS "epd")
set(CPACK_COMPONENT_CLIENT-DEV_DESCRIPTION "expert-parallel communication daemon - headers
These are the headers of the client library for C and C++, and what CMake
and pkg-config need to find it. The package epd has the guide.")

set(CPACK_DEBIAN_PYTHON_PACKAGE_NAME python3-epd)
set(CPACK_DEBIAN_PYTHON_PACKAGE_SECTION python)
set(CPACK_DEBIAN_PYTHON_PACKAGE_ARCHITECTURE all)
set(CPACK_DEBIAN_PYTHON_PACKAGE_SHLIBDEPS OFF)
set(CPACK_DEBIAN_PYTHON_PACKAGE_DEPENDS "python3 (>= 3.9)")
set(CPACK_DEBIAN_PYTHON_PACKAGE_RECOMMENDS "python3-numpy")
set(CPACK_COMPONENT_PYTHON_DESCRIPTION "expert-parallel communication daemon - Python 3 module
This package has the module epd, which calls libepd by ctypes, and its
examples.")
install(DIRECTORY ${PROJECT_SOURCE_DIR}/client/python/epd DESTINATION lib/python3/dist-packages COMPONENT python EXCLUDE_FROM_ALL
  FILES_MATCHING PATTERN "*.py" PATTERN "py.typed" PATTERN "__pycache__" EXCLUDE)
install(DIRECTORY ${PROJECT_BINARY_DIR}/deploy/documents/python3-epd DESTINATION share/doc COMPONENT python EXCLUDE_FROM_ALL)
string(TIMESTAMP _date "%a, %d %b %Y %H:%M:%S +0000" UTC)  # $SOURCE_DATE_EPOCH, if it is set
file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/debian/changelog.Debian "epd (${PROJECT_VERSION}-1) unstable; urgency=medium

  * /usr/share/doc/epd/CHANGELOG.md says what has changed.

 -- ${EPD_MAINTAINER}  ${_date}
")
execute_process(COMMAND gzip --best --no-name --force ${CMAKE_CURRENT_BINARY_DIR}/debian/changelog.Debian
  COMMAND_ERROR_IS_FATAL ANY)
foreach(_package daemon:epd client:libepd1 client-dev:libepd-dev python:python3-epd)
  string(REPLACE ":" ";" _package ${_package})
  list(GET _package 0 _component)
  list(GET _package 1 _name)
  install(FILES ${CMAKE_CURRENT_LIST_DIR}/copyright ${CMAKE_CURRENT_BINARY_DIR}/debian/changelog.Debian.gz DESTINATION share/doc/${_name} COMPONENT ${_component} EXCLUDE_FROM_ALL)
endforeach()

# The scripts are run from the build directory, where they are executable whatever the checkout says.
set(_scripts)
foreach(_script postinst prerm postrm python/postinst python/prerm)
  configure_file(${CMAKE_CURRENT_LIST_DIR}/${_script} ${CMAKE_CURRENT_BINARY_DIR}/debian/${_script} COPYONLY
    FILE_PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
  if(_script MATCHES "^python/")
    list(APPEND CPACK_DEBIAN_PYTHON_PACKAGE_CONTROL_EXTRA ${CMAKE_CURRENT_BINARY_DIR}/debian/${_script})
  else()
    list(APPEND _scripts ${CMAKE_CURRENT_BINARY_DIR}/debian/${_script})
  endif()
endforeach()
configure_file(${CMAKE_CURRENT_LIST_DIR}/conffiles ${CMAKE_CURRENT_BINARY_DIR}/debian/conffiles COPYONLY)
set(CPACK_DEBIAN_DAEMON_PACKAGE_CONTROL_EXTRA ${_scripts} ${CMAKE_CURRENT_BINARY_DIR}/debian/conffiles)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
include(CPack)
